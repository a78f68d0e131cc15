"""What ranks share: their group, their agreements, and the layout of a batch over them."""
