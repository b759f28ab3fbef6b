"""What gunicorn serves."""

from __future__ import annotations

import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.http.django_shop.settings")
django = get_wsgi_application()

from idemconsumer.http.wsgi import IdempotencyMiddleware  # noqa: E402
from tests.http.blackbox.served.wsgi import Dying  # noqa: E402
from tests.http.django_shop.urls import DOOR  # noqa: E402

application = Dying(IdempotencyMiddleware(django, DOOR))
