"""The stages put together: copy, receive, transform, apply and publish, under one lock."""
