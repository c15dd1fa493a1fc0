"""``python -m packtool``."""

from packtool.cli.main import main

if __name__ == "__main__":
    main()
