"""What an enemy, or a stranger's mistake, may put in front of the product."""
