"""`python -m idemconsumer`."""

from idemconsumer.cli import main

if __name__ == "__main__":
    main(prog_name="idemconsumer")
