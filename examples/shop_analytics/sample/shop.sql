-- A shop: products, orders and their lines. An order and its lines are written in one transaction.
CREATE TABLE products (id int PRIMARY KEY, name text NOT NULL, price numeric(10, 2) NOT NULL);
CREATE TABLE orders (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer_id int NOT NULL,
    placed_at timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE order_lines (
    order_id bigint NOT NULL REFERENCES orders,
    line int NOT NULL,
    product_id int NOT NULL REFERENCES products,
    quantity int NOT NULL,
    price numeric(10, 2) NOT NULL,
    PRIMARY KEY (order_id, line)
);

INSERT INTO products SELECT n, 'product ' || n, 1 + n * 0.25 FROM generate_series(1, 20) n;

CREATE PROCEDURE place_order(customer int) LANGUAGE sql AS $$
    WITH placed AS (INSERT INTO orders (customer_id) VALUES (customer) RETURNING id)
    INSERT INTO order_lines
    SELECT placed.id, row_number() OVER (), products.id, 1 + products.id % 3, products.price
    FROM placed, products WHERE products.id % 7 = customer % 7;
$$;

DO $$ BEGIN FOR n IN 1..100 LOOP CALL place_order(1 + n % 25); END LOOP; END $$;
