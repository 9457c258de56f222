"""`python -m gateway` is `gemma-gateway`."""

from gateway.cli import main

if __name__ == "__main__":
    main()
