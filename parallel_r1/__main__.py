"""`python -m parallel_r1`. Imports only: a class defined in the module that runs as __main__ could not be configured."""

from parallel_r1.shell import main

if __name__ == "__main__":
    main()
