"""m-FeDepth, the client's side: FeDepth whose blocks have heads of their own (section 4.1, the variant)."""

from functools import partial

from piecework.client_app.trainers.cascade import fedepth

train = partial(fedepth.train, own_heads=True)
