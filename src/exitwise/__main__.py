"""`python -m exitwise`."""

from exitwise.cli import main

main()
