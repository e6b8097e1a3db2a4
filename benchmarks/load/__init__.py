"""Load on routers and workers over HTTP, and what stands behind them."""
