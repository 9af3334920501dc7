"""Training: recipes, the loop, and heads on a frozen backbone."""
