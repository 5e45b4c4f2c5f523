// cp.async's copies at the moment a thread waits for them; instrumented, so that a sanitizer sees them as that thread's.
#include "simt.h"

namespace simt {

bool next_copy(int groups_left, char** to, const char** from, int* bytes);

void copy_wait(int groups_left) {
  char* to;
  const char* from;
  int bytes;
  while (next_copy(groups_left, &to, &from, &bytes))
    for (int i = 0; i < 16; ++i) to[i] = i < bytes ? from[i] : 0;
}

}  // namespace simt
