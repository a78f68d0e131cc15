"""Which classes are exact on images and videos: every image-text-to-text class of Transformers and Phi-4 Multimodal,
over two ranks beside one process.

    python -m tests.support.image_coverage          # all classes
    python -m tests.support.image_coverage --write  # and writes the table; with --classes, some of its rows

The model is the tiny one of the family (`tests/support/tiny_seeing.py`), in fp64. Compared are the loss and all
gradients, of towers too, on each kind of batch of `tests/support/tiny_pictures.py`; one process is given packed
documents one by one. Of a class that refuses images the table has the sentence, and the error on text.
"""

import argparse

from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from recipes.coverage import Table, run
from tests.support.image_verdicts import compare_images
from tests.support.tiny_pictures import KINDS

IMAGES = Table(
    "coverage_images",
    (*sorted({*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()}), "Phi4MultimodalForCausalLM"),
    compare_images,
    "Images through every image-text-to-text class and Phi-4 Multimodal",
    "python -m tests.support.image_coverage",
    KINDS,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(table=IMAGES)
    run(parser)


if __name__ == "__main__":
    main()
