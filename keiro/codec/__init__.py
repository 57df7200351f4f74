"""Values to stored JSON and back.

What is stored is what a later read gives back, or it is refused before anything is written: nothing is dropped
or rounded on the way. A body sees decoded JSON on the first run too, so what JSON itself cannot keep shows at
once: without an annotation a tuple is a list, `{1: …}` and `{"1": …}` are one key, and the offset of a time zone
has whole minutes.
"""

from keiro.codec.chain import Codec as Codec
from keiro.codec.decoding import Decoder as Decoder
from keiro.codec.decoding import decoder_for as decoder_for
from keiro.codec.decoding import result_decoder as result_decoder
from keiro.codec.encoding import MAX_DEPTH as MAX_DEPTH
from keiro.codec.encoding import PAYLOAD_LIMIT as PAYLOAD_LIMIT
from keiro.codec.encoding import digest as digest
from keiro.codec.encoding import encode as encode
from keiro.codec.inputs import InputCodec as InputCodec
from keiro.codec.inputs import input_codec as input_codec
