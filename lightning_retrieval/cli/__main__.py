"""`python -m lightning_retrieval.cli` runs the same program as the command `lightning-retrieval`."""

from lightning_retrieval.cli.main import main

if __name__ == "__main__":
    main()
