"""Run directories, and the operations that commands perform on them."""
