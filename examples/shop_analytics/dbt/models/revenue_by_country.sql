-- Two databases have no common LSN, so an order may arrive before its customer. The left join keeps such an order.
select coalesce(c.country, 'unknown') as country, sum(l.quantity * l.price) as revenue
from {{ source('shop_warehouse', 'orders') }} o
join {{ source('shop_warehouse', 'order_lines') }} l on l.order_id = o.id
left join {{ source('crm_warehouse', 'customers') }} c on c.id = o.customer_id
group by 1
