"""Joint decoding: one walk of the model for all tenants of a process that decode."""

from symbiosis.client.joint.decoder import MODES, JointDecoder, Seat, make_decoder

__all__ = ["MODES", "JointDecoder", "Seat", "make_decoder"]
