// From problem to what runs it. Problems met before are looked up here; a new one is asked of the package's Dispatch, in
// Python, which chooses a variant, checks its files and loads it.
#pragma once

#include <Python.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>

#include "driver.h"

namespace {

struct WithGil {
    PyGILState_STATE state = PyGILState_Ensure();
    ~WithGil() { PyGILState_Release(state); }
};

struct WithoutGil {
    PyThreadState* state = PyEval_SaveThread();
    ~WithoutGil() { PyEval_RestoreThread(state); }
};

struct Problem {
    static constexpr size_t MOST = 12;
    std::array<std::int64_t, MOST> words{};  // device (-1: CPU), dtype, sizes
    size_t count = 2;

    Problem(int device, c10::ScalarType dtype, std::initializer_list<std::int64_t> sizes) {
        words[0] = device, words[1] = static_cast<std::int64_t>(dtype);
        for (const std::int64_t n : sizes) words[count++] = n;
    }

    int device() const { return static_cast<int>(words[0]); }
    c10::ScalarType dtype() const { return static_cast<c10::ScalarType>(words[1]); }
    bool operator==(const Problem& other) const { return words == other.words; }
};

struct HashOfProblem {
    size_t operator()(const Problem& p) const {
        std::uint64_t h = 0x9e3779b97f4a7c15u;
        for (size_t i = 0; i < p.count; ++i) {
            h = (h ^ static_cast<std::uint64_t>(p.words[i])) * 0xff51afd7ed558ccdu;
            h ^= h >> 32;
        }
        return static_cast<size_t>(h);
    }
};

// What Dispatch has said of a problem. `text`: the variant, for people, or why there is none.
struct Answer {
    Launch launch;
    int variant = -1;
    std::string text;

    bool serves() const { return variant >= 0; }
};

class Table {
  public:
    // resolve(device, C++'s name of the dtype, *sizes): see _native.py. retire(variant, device, reason).
    Table(PyObject* resolve, PyObject* retire) { connect(resolve, retire); }

    void connect(PyObject* resolve, PyObject* retire) {
        Py_INCREF(resolve), Py_INCREF(retire);
        Py_XSETREF(resolve_, resolve);
        Py_XSETREF(retire_, retire);
        clear();
    }

    std::shared_ptr<const Answer> find(const Problem& problem) {
        {
            const std::shared_lock<std::shared_mutex> reading(state_->mutex);
            if (const auto found = state_->answers.find(problem); found != state_->answers.end()) return found->second;
        }
        return ask(problem);
    }

    void clear() {
        const std::unique_lock<std::shared_mutex> writing(state_->mutex);
        state_->answers.clear();
        ++state_->cleared;
    }

    // Whoever held the lock, and was perhaps changing the answers, is not in this process.
    void after_fork() { state_ = new State; }

    // A variant whose launch failed is not tried again.
    void retire(const Answer& answer, int device, const std::string& reason) {
        const WithGil gil;
        PyObject* done = PyObject_CallFunction(retire_, "iis", answer.variant, device, reason.c_str());
        Py_XDECREF(done);
        PyErr_Clear();
        clear();
    }

  private:
    static constexpr size_t MOST_ANSWERS = 4096;

    struct State {
        std::shared_mutex mutex;
        std::unordered_map<Problem, std::shared_ptr<const Answer>, HashOfProblem> answers;
        std::uint64_t cleared = 0;
    };

    std::shared_ptr<const Answer> ask(const Problem& problem) {
        const WithGil gil;
        std::uint64_t cleared;
        {
            const std::shared_lock<std::shared_mutex> reading(state_->mutex);
            cleared = state_->cleared;
        }
        auto answer = std::make_shared<Answer>();
        bool lasting = false;
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        if (!read(problem, *answer, lasting)) {
            PyErr_Clear();
            answer->variant = -1, answer->text = "the launcher cannot ask for a variant", lasting = false;
        }
        PyErr_Restore(type, value, trace);
        if (lasting) {
            const std::unique_lock<std::shared_mutex> writing(state_->mutex);
            if (state_->answers.size() >= MOST_ANSWERS) state_->answers.clear();
            if (cleared == state_->cleared) state_->answers.emplace(problem, answer);
        }
        return answer;
    }

    bool read(const Problem& problem, Answer& answer, bool& lasting) {
        PyObject* key = PyTuple_New(static_cast<Py_ssize_t>(problem.count));
        if (!key) return false;
        PyTuple_SET_ITEM(key, 0, PyLong_FromLong(problem.device()));
        PyTuple_SET_ITEM(key, 1, PyUnicode_FromString(c10::toString(problem.dtype())));
        for (size_t i = 2; i < problem.count; ++i)
            PyTuple_SET_ITEM(key, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(problem.words[i]));
        PyObject* found = PyObject_Call(resolve_, key, nullptr);
        Py_DECREF(key);
        if (!found) return false;
        Launch& l = answer.launch;
        const char* text = nullptr;
        int last = 0, programmatic = 0;
        unsigned long long function = 0, unaligned = 0, context = 0, alignment = 1;
        const bool read = PyArg_ParseTuple(
            found, "ispKKK(III)IIIpK", &answer.variant, &text, &last, &function, &unaligned, &context, &l.grid[0],
            &l.grid[1], &l.grid[2], &l.threads, &l.smem_bytes, &l.cluster, &programmatic, &alignment);
        if (read) {
            answer.text = text, lasting = last, l.programmatic = programmatic, l.misaligned = alignment - 1;
            l.function = reinterpret_cast<void*>(function), l.unaligned = reinterpret_cast<void*>(unaligned);
            l.context = reinterpret_cast<void*>(context);
        }
        Py_DECREF(found);
        return read;
    }

    PyObject *resolve_ = nullptr, *retire_ = nullptr;
    State* state_ = new State;
};

}  // namespace
