"""``python -m maxvision``: see ``maxvision.commands.main``."""

from maxvision.commands.main import command

if __name__ == "__main__":
    command()
