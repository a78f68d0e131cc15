"""What ranks share: their group, how they agree, and how a batch lies over them."""
