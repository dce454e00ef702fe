"""`python -m medusa_train`, the same program as the `medusa-train` command."""

from medusa_train.cli.app import main

if __name__ == "__main__":
    main()
