"""What every other folder may use: errors, the console, the process. Nothing of MAX."""

__version__ = "0.1.0"
