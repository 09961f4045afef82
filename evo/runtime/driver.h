// Launches on PyTorch's streams through the CUDA driver, whose library is opened when it is first needed: neither CUDA's
// headers nor its runtime are asked for. What is declared here has the layout of cuda.h.
// Reference: CUDA Driver API, Execution Control.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <string>

namespace {  // seen by nobody else: several of these modules live in one process

struct LaunchAttribute {  // CUlaunchAttribute
    int id, pad;
    unsigned value[16];
};

struct LaunchConfig {  // CUlaunchConfig
    unsigned grid[3], block[3], smem_bytes;
    void* stream;
    LaunchAttribute* attributes;
    unsigned attribute_count;
};

// One way to run one variant at one problem. CUDA: a function of the driver's; CPU: the address of a C function.
struct Launch {
    void *function = nullptr, *unaligned = nullptr;
    void* context = nullptr;  // the GPU's primary one; none: a CPU
    unsigned grid[3] = {1, 1, 1}, block[3] = {1, 1, 1};
    unsigned smem_bytes = 0, cluster = 1;
    bool programmatic = false;
    std::uintptr_t misaligned = 0;  // the bits that no address may have for `function` to do

    bool on_cpu() const { return !context; }
};

class Driver {
  public:
    // Null where there is no driver, or PyTorch has no CUDA.
    static const Driver* get() {
        static const Driver driver;
        return driver.current_stream_ && driver.launch_ && driver.get_context_ && driver.push_ && driver.pop_ ? &driver
                                                                                                              : nullptr;
    }

    // Enqueues a kernel on the current stream of GPU `device`, which need not be the current one. An error, or 0.
    // addresses: all addresses among the arguments, or-ed.
    int launch(const Launch& what, int device, std::uintptr_t addresses, void** arguments) const {
        const bool aligned = !(addresses & what.misaligned);
        LaunchAttribute attributes[2];
        LaunchConfig config = {{what.grid[0], what.grid[1], what.grid[2]}, {what.block[0], what.block[1], what.block[2]}, 0, nullptr, attributes, 0};
        if (aligned) {
            config.smem_bytes = what.smem_bytes;
            if (what.cluster > 1) attributes[config.attribute_count++] = {CLUSTER_DIMENSION, 0, {what.cluster, 1, 1}};
            if (what.programmatic) attributes[config.attribute_count++] = {PROGRAMMATIC, 0, {1}};
        }
        if (current_stream_(device, &config.stream)) return UNKNOWN;
        void* current = nullptr;  // none in a thread that has not used CUDA yet
        get_context_(&current);
        const bool elsewhere = current != what.context;
        if (elsewhere)
            if (const int error = push_(what.context)) return error;
        const int error = launch_(&config, aligned ? what.function : what.unaligned, arguments, nullptr);
        if (elsewhere) pop_(&current);
        return error;
    }

    // Errors of a stream that is being captured: they tell nothing of the variant.
    static bool is_of_capture(int error) { return 900 <= error && error < 920; }

    std::string name_of(int error) const {
        const char* name = nullptr;
        if (name_) name_(error, &name);
        return std::string(name ? name : "CUDA error") + " (" + std::to_string(error) + ")";
    }

  private:
    static constexpr int CLUSTER_DIMENSION = 4, PROGRAMMATIC = 6, UNKNOWN = 999;

    Driver() {
        if (void* cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {
            find(cuda, "cuLaunchKernelEx", launch_);
            find(cuda, "cuCtxGetCurrent", get_context_);
            find(cuda, "cuCtxPushCurrent_v2", push_);
            find(cuda, "cuCtxPopCurrent_v2", pop_);
            find(cuda, "cuGetErrorName", name_);
        }
        // Part of PyTorch's C interface for compiled models (aoti_torch/c/shim.h).
        if (void* torch = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD))
            find(torch, "aoti_torch_get_current_cuda_stream", current_stream_);
    }

    template <class Function>
    static void find(void* library, const char* name, Function& function) {
        function = reinterpret_cast<Function>(dlsym(library, name));
    }

    int (*launch_)(const LaunchConfig*, void*, void**, void**) = nullptr;
    int (*get_context_)(void**) = nullptr;
    int (*push_)(void*) = nullptr;
    int (*pop_)(void**) = nullptr;
    int (*name_)(int, const char**) = nullptr;
    std::int32_t (*current_stream_)(std::int32_t, void**) = nullptr;
};

}  // namespace
