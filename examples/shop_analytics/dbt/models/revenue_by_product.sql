select p.name as product, count(distinct l.order_id) as orders, sum(l.quantity * l.price) as revenue
from {{ source('shop_warehouse', 'order_lines') }} l
join {{ source('shop_warehouse', 'products') }} p on p.id = l.product_id
group by 1
