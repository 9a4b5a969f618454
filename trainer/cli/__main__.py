"""`python -m rolloutbus.trainer.cli`."""

from . import main

main()
