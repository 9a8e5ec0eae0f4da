// A plug-in in order, on a machine without its device.
#include <cstdio>

#include "tinyloop/backend.h"

namespace {

int32_t device_count(tl_status* status) {
    std::snprintf(status->message, sizeof status->message, "no driver (error 35)");
    return 0;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const tl_backend* tinyloop_backend(void) {
    static const tl_backend table = [] {
        tl_backend absent{};
        absent.abi = TL_BACKEND_ABI;
        absent.size = sizeof absent;
        absent.name = "absent";
        absent.device_count = device_count;
        return absent;
    }();
    return &table;
}
