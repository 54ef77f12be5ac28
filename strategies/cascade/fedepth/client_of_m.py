"""m-FeDepth, the client's side: FeDepth with a separate head for each block (the variant in section 4.1)."""

from functools import partial

from piecework.strategies.cascade.fedepth import client as fedepth

train = partial(fedepth.train, own_heads=True)
