// Which backend a device's name means. The CPU's is built in; "cuda:1" is device 1 of the plug-in libtinyloop_cuda.so,
// looked for in the folders of TINYLOOP_BACKEND_PATH and then beside this library. Knows nothing of any device.
#pragma once
#include <string>

#include "tinyloop/backend.h"

namespace tinyloop {

struct Device {
    const tl_backend* backend;  // lives as long as the process: a plug-in is never unloaded
    int ordinal;
    std::string name;  // in full: "cpu", "cuda:0"
};

// Throws ErrorKind::config for what cannot be a device's name, ErrorKind::unavailable with the reason for one that this
// machine or this build does not have.
Device open_device(const std::string& name);

}  // namespace tinyloop
