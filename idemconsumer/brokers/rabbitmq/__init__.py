"""RabbitMQ, through aio-pika. The only room that imports that driver."""
