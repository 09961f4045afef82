// Loads machine code and launches it through the CUDA driver, whose library is opened here: neither CUDA's headers nor a
// toolkit are needed to build this. Config and Attribute have the layout of CUlaunchConfig and CUlaunchAttribute (cuda.h).
#include <dlfcn.h>

#include <cstdint>
#include <string>
#include <vector>

struct Attribute {
    int id, pad;
    unsigned value[16];
};

struct Config {
    unsigned grid[3], block[3], smem_bytes;
    void* stream;
    Attribute* attributes;
    unsigned attribute_count;
};

template <class Function>
static Function driver(const char* name) {
    static void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    TORCH_CHECK(library, "there is no CUDA driver (libcuda.so.1)");
    void* found = dlsym(library, name);
    TORCH_CHECK(found, "this CUDA driver has no ", name);
    return reinterpret_cast<Function>(found);
}

static void expect(int error, const char* doing) {
    if (!error) return;
    const char* name = nullptr;
    driver<int (*)(int, const char**)>("cuGetErrorName")(error, &name);
    TORCH_CHECK(false, doing, ": ", name ? name : "CUDA error", " (", error, ")");
}

// The entry point, loaded into the current context, which is PyTorch's.
int64_t load_entry(const std::string& image, const std::string& entry, int64_t smem_bytes, int64_t cluster) {
    void *code = nullptr, *function = nullptr;
    const auto set = driver<int (*)(void*, int, int)>("cuFuncSetAttribute");
    expect(driver<int (*)(void**, const void*)>("cuModuleLoadData")(&code, image.c_str()), "the kernel does not load");
    expect(driver<int (*)(void**, void*, const char*)>("cuModuleGetFunction")(&function, code, entry.c_str()),
           "the kernel has no such entry point");
    // The maximum of dynamic shared memory (8), and clusters of more than 8 blocks (14): CUfunction_attribute.
    if (smem_bytes > 0) expect(set(function, 8, static_cast<int>(smem_bytes)), "the kernel needs more shared memory");
    if (cluster > 8) expect(set(function, 14, 1), "the kernel needs larger clusters");
    return reinterpret_cast<int64_t>(function);
}

// geometry: grid x, y, z, threads, bytes of shared memory, blocks of a cluster, whether programmatic. words: the arguments,
// each in the first of 8 bytes.
void launch_entry(int64_t function, const std::vector<int64_t>& geometry, int64_t stream, const std::string& words) {
    Attribute attributes[2] = {};
    Config config = {};
    for (int i = 0; i < 3; ++i) config.grid[i] = static_cast<unsigned>(geometry.at(i));
    config.block[0] = static_cast<unsigned>(geometry.at(3));
    config.block[1] = config.block[2] = 1;
    config.smem_bytes = static_cast<unsigned>(geometry.at(4));
    config.stream = reinterpret_cast<void*>(stream);
    config.attributes = attributes;
    if (geometry.at(5) > 1) {  // cluster dimension
        Attribute& a = attributes[config.attribute_count++];
        a.id = 4, a.value[0] = static_cast<unsigned>(geometry[5]), a.value[1] = a.value[2] = 1;
    }
    if (geometry.at(6)) {  // programmatic stream serialization
        Attribute& a = attributes[config.attribute_count++];
        a.id = 6, a.value[0] = 1;
    }
    std::vector<void*> arguments(words.size() / 8);
    for (size_t i = 0; i < arguments.size(); ++i) arguments[i] = const_cast<char*>(words.data() + 8 * i);
    static const auto launch = driver<int (*)(const Config*, void*, void**, void**)>("cuLaunchKernelEx");
    expect(launch(&config, reinterpret_cast<void*>(function), arguments.data(), nullptr), "the launch failed");
}
