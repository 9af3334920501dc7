"""`python -m exitwise`."""

from exitwise.cli.app import main

main()
