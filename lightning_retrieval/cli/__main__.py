"""`python -m lightning_retrieval.cli` is the command `lightning-retrieval`."""

from lightning_retrieval.cli.main import main

if __name__ == "__main__":
    main()
