"""RabbitMQ, through aio-pika. Only this folder imports that driver.

`rabbitmq_session` consumes and acknowledges, `tap` reads its deliveries from the bytes, `link` connects, `limits`
reports what a queue's arguments would lose.
"""
