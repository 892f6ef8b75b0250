"""python -m tfla.lm: language models on the mLSTM, from text files to generated text."""

import sys

from tfla.lm.cli import main

if __name__ == "__main__":
    sys.exit(main())
