// What a model's matrices are held in: the names that users choose from, and the tl_dtype behind each.
#pragma once
#include <string>

#include "tinyloop/engine.h"

namespace tinyloop {

// The tl_dtype, or TL_AS_STORED, that `asked` stands for: "auto" is TINYLOOP_WEIGHTS where that is set, else the
// artifact's own. Throws ErrorKind::config, also where the artifact holds other integers.
int parse_weight_format(const std::string& asked, const ArtifactInfo& info);

// The name of `dtype`; of TL_AS_STORED what the artifact's matrices are in, "mixed" when they differ.
std::string weight_format_name(int dtype, const ArtifactInfo& info);

}  // namespace tinyloop
