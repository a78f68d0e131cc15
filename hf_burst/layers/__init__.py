"""One rank's layers in less memory. Nothing here knows of other ranks."""
