"""Pages of the application. Each module has `layout(...)` and `register(...)`; `dashboard.app` lists them."""
