"""`python -m idemconsumer`."""

from idemconsumer.cli.main import main

if __name__ == "__main__":
    main(prog_name="idemconsumer")
