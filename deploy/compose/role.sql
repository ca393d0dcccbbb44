-- Creates the role with which pgcdc connects to the shop, and the publications. The role may only replicate and read.
-- psql runs this file once, after shop.sql. For PostgreSQL 17, `pgcdc setup --sql --role replicator` prints the same
-- publications.
\getenv password REPLICATOR_PASSWORD
CREATE ROLE replicator LOGIN REPLICATION PASSWORD :'password';
GRANT USAGE ON SCHEMA public TO replicator;
GRANT SELECT ON ALL TABLES IN SCHEMA public TO replicator;
CREATE PUBLICATION "pgcdc" WITH (publish = 'insert, update, delete, truncate', publish_via_partition_root = false);
COMMENT ON PUBLICATION "pgcdc" IS 'Made by pgcdc_assets for slot pgcdc, with the slot';
CREATE PUBLICATION "pgcdc_inserts" WITH (publish = 'insert, truncate', publish_via_partition_root = false);
COMMENT ON PUBLICATION "pgcdc_inserts" IS 'Made by pgcdc_assets for slot pgcdc, with the slot';
ALTER PUBLICATION "pgcdc" ADD TABLE ONLY "public"."carts";
ALTER PUBLICATION "pgcdc" ADD TABLE ONLY "public"."customers";
ALTER PUBLICATION "pgcdc" ADD TABLE ONLY "public"."events";
ALTER PUBLICATION "pgcdc" ADD TABLE ONLY "public"."order_lines";
ALTER PUBLICATION "pgcdc" ADD TABLE ONLY "public"."orders";
ALTER PUBLICATION "pgcdc" ADD TABLE ONLY "public"."payments";
ALTER PUBLICATION "pgcdc" ADD TABLE ONLY "public"."products";
