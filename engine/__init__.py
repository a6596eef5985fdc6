import os

# transformers would advise every user to install PyTorch, in words that read like a failure.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
