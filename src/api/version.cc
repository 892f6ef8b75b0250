#include "tfla/tfla.h"

namespace tfla {

const char* version() { return TFLA_VERSION; }

}  // namespace tfla
