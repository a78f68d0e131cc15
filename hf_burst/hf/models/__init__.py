"""Which models are served, and how their functions are found."""
