"""The steps of one worker: how many a run takes, with which batches, and what is reported of them."""
