"""Training: recipes, the training loop, and head training on a frozen backbone."""
