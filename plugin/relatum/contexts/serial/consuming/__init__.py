"""Consuming a super stream's contexts in their order: the consumers of both faces, and what they stand on."""
