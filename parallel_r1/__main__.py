"""`python -m parallel_r1`. Imports only: a class that is defined in `__main__` could not be configured."""

from parallel_r1.shell import main

if __name__ == "__main__":
    main()
