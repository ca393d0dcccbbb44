-- The customers are in a separate database.
CREATE TABLE customers (id int PRIMARY KEY, name text NOT NULL, country text NOT NULL);
INSERT INTO customers SELECT n, 'customer ' || n, (ARRAY['DE', 'FR', 'JP'])[1 + n % 3] FROM generate_series(1, 30) n;
