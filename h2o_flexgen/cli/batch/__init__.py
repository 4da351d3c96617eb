"""`batch`: its flags, and what it does behind them."""
