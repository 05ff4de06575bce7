// What every library shares: how a function is exported under its plain C name.
#pragma once

#define ZE_EXPORT extern "C" __attribute__((visibility("default")))
