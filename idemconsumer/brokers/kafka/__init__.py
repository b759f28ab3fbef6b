"""Kafka, through aiokafka. The only room that imports that driver."""
