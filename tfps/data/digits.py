"""The digits in the package, so that a demo needs no download.

They are the 1,797 images of the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak,
UCI Machine Learning Repository, 1998, https://doi.org/10.24432/C50P49, CC BY 4.0; see ``digits.LICENSE``).

Their order has two consequences. It goes by writer, 13 in all. So the last fifth is by people whose digits were never
trained on, except for the writer at the cut. Accuracy there is some points lower than on a random fifth, and honest.
And each writer wrote the same sequence, which begins 0 1 2 ... 9 three times. So a worker's share, every n-th image,
has uneven classes when n divides 10: of 10 workers, one gets two images of a class and 34 of another. Asynchronous and
synchronous training sum over workers, so this does not affect them.

Must not import TensorFlow.
"""

from importlib import resources

import numpy as np

from tfps.data.idx import Bytes, Images, keep_last_fifth

MAX_VALUE = 16  # of a stored pixel, which counts the ink in 4x4 pixels of the scan
SCALE = 3
BORDER = 2


def load() -> Images:
    """Return the digits at MNIST's size, the first 1,438 for training and the last 359 for evaluation."""
    with resources.files("tfps.data").joinpath("digits.npz").open("rb") as file, np.load(file) as stored:
        return keep_last_fifth(enlarge(stored["images"]), stored["labels"])


def enlarge(images: Bytes) -> Bytes:
    """Convert 8x8 images of 0 to 16 into 28x28 images of 0 to 255: each pixel becomes 3x3, with a border of 2."""
    values = (images.astype(np.uint16) * 255 + MAX_VALUE // 2) // MAX_VALUE
    large = values.astype(np.uint8).repeat(SCALE, axis=1).repeat(SCALE, axis=2)
    return np.pad(large, ((0, 0), (BORDER, BORDER), (BORDER, BORDER)))
