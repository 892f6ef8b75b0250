// tfla analyse flops, bytes: the tables of appendix F.
#include <fmt/format.h>

#include <cmath>

#include "cli/analyse/analyse.h"
#include "cli/support/options.h"
#include "core/names.h"

namespace tfla::cli {
namespace {

using analysis::Model;
using analysis::Pass;
using analysis::Polynomial;
using analysis::Term;

// Every pass, formulation and gate that has a table.
template <class Visit>
void for_models(const AnalyseOptions& options, const Visit& visit) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const Formulation formulation : {Formulation::chunkwise, Formulation::parallel, Formulation::recurrent}) {
      if (pass == Pass::backward && formulation == Formulation::recurrent) continue;
      for (const InputGate gate : {InputGate::exponential, InputGate::sigmoid}) {
        Model model = options.model(pass, formulation);
        model.gate = gate;
        visit(model);
      }
    }
  }
}

std::string unit_text(const Model& model, const AnalyseOptions& options) {
  switch (model.formulation) {
    case Formulation::chunkwise: return fmt::format("chunk of {}", options.chunk);
    case Formulation::parallel: return fmt::format("sequence of {}", options.workload.tokens);
    case Formulation::recurrent: break;
  }
  return "token";
}

using Count = std::vector<Term> (*)(const Model&);

// One row per row of the paper's tables, and the polynomial behind it. `printed` may be left out.
Sheet term_sheet(const std::string& file, const std::string& title, const AnalyseOptions& options, Count count,
                 Count printed) {
  Sheet sheet{.name = file,
              .columns = {"pass", "formulation", "gate", "term", "constant", "linear", "quadratic", "per head and",
                          "count", "products"},
              .title = title};
  if (printed != nullptr) sheet.columns.emplace_back("paper simplified");
  for_models(options, [&](const Model& model) {
    const double x = analysis::unit(model.formulation, options.workload.tokens, options.chunk);
    const bool has_printed = printed != nullptr && model.pass == Pass::forward;
    const std::vector<Term> simplified = has_printed ? printed(model) : std::vector<Term>();
    const std::vector<Term> terms = count(model);
    for (std::size_t row = 0; row < terms.size(); ++row) {
      const Term& term = terms[row];
      std::vector<std::string> cells = {pass_name(model.pass),
                                        name(model.formulation),
                                        name(model.gate),
                                        term.name,
                                        csv_count(term.count.constant),
                                        csv_count(term.count.linear),
                                        csv_count(term.count.quadratic),
                                        unit_text(model, options),
                                        csv_count(term.count(x)),
                                        csv_count(term.products(x))};
      if (printed != nullptr) cells.push_back(has_printed ? csv_count(simplified[row].count(x)) : "");
      sheet.rows.push_back(cells);
    }
  });
  return sheet;
}

Sheet total_sheet(const std::string& file, const std::string& title, const AnalyseOptions& options, Count count,
                  Polynomial (*printed)(const Model&)) {
  Sheet sheet{.name = file,
              .columns = {"pass", "formulation", "gate", "exact", "paper total", "paper over exact"},
              .title = title};
  for_models(options, [&](const Model& model) {
    const double x = analysis::unit(model.formulation, options.workload.tokens, options.chunk);
    const double exact = analysis::total(analysis::sum(count(model)), x, options.workload);
    std::vector<std::string> cells = {pass_name(model.pass), name(model.formulation), name(model.gate),
                                      csv_count(exact)};
    if (model.pass == Pass::forward) {
      const double paper = analysis::total(printed(model), x, options.workload);
      cells.push_back(csv_count(paper));
      cells.push_back(fmt::format("{:.5f}", paper / exact));
    } else {
      cells.insert(cells.end(), {"", ""});
    }
    sheet.rows.push_back(cells);
  });
  return sheet;
}

std::string size_text(const AnalyseOptions& options) {
  return fmt::format("B {} T {} H {} dqk {} dhv {}, chunk {}, causal factor {}, states of {} bytes",
                     options.workload.batch, options.workload.tokens, options.workload.heads, options.dims.dqk,
                     options.dims.dhv, options.chunk, options.causal, options.state_bytes);
}

// mLSTMexp over mLSTMsig, by the table of totals.
Sheet gate_sheet(const AnalyseOptions& options) {
  Sheet sheet{.name = "flops_gates",
              .columns = {"formulation", "head dimension", "chunk", "exp over sig percent", "exact percent"},
              .title = "mLSTMexp over mLSTMsig (dqk = dhv), FLOPs"};
  for (const Formulation formulation : {Formulation::chunkwise, Formulation::parallel, Formulation::recurrent}) {
    for (const double dim : {64.0, 128.0, 256.0, 512.0}) {
      for (const double chunk : {64.0, 128.0, 256.0}) {
        if (formulation != Formulation::chunkwise && chunk != 64) continue;
        Model model = options.model(Pass::forward, formulation);
        model.dims = {dim, dim};
        const double x = analysis::unit(formulation, options.workload.tokens, chunk);
        const auto more = [&](Polynomial (*count)(const Model&)) {
          model.gate = InputGate::exponential;
          const double with = count(model)(x);
          model.gate = InputGate::sigmoid;
          return 100 * (with / count(model)(x) - 1);
        };
        sheet.rows.push_back(
            {name(formulation), csv_number(dim), formulation == Formulation::chunkwise ? csv_number(chunk) : "",
             fmt::format("{:.3f}", more(analysis::printed_flops)), fmt::format("{:.3f}", more(analysis::flops))});
      }
    }
  }
  return sheet;
}

// The paper's figure: one head, one sequence, three head dimensions, chunk sizes from 1 to T.
Sheet curve_sheet(const AnalyseOptions& options) {
  Sheet sheet{.name = "flops_curves",
              .columns = {"dqk", "dhv", "causal", "chunk", "chunkwise", "recurrent", "parallel"}};
  const double tokens = options.workload.tokens;
  for (const double share : {1.0, 0.5, 0.25}) {
    for (const double causal : {0.5, 0.66, 1.0}) {
      for (const double chunk : powers_of_two(0, static_cast<int>(std::floor(std::log2(tokens))), 4)) {
        const auto count = [&](Formulation formulation) {
          Model model = options.model(Pass::forward, formulation);
          model.dims = {share * options.dims.dqk, share * options.dims.dhv};
          model.factors.causal = causal;
          return csv_number(analysis::total(analysis::printed_flops(model), analysis::unit(formulation, tokens, chunk),
                                            {.tokens = tokens}));
        };
        sheet.rows.push_back({csv_number(share * options.dims.dqk), csv_number(share * options.dims.dhv),
                              csv_number(causal), csv_number(chunk), count(Formulation::chunkwise),
                              count(Formulation::recurrent), count(Formulation::parallel)});
      }
    }
  }
  return sheet;
}

}  // namespace

const char* pass_name(Pass pass) { return pass == Pass::forward ? "forward" : "backward"; }

std::vector<double> powers_of_two(int from, int to, int per_octave) {
  std::vector<double> values;
  for (int x = from * per_octave; x <= to * per_octave; ++x) {
    values.push_back(std::exp2(static_cast<double>(x) / per_octave));
  }
  return values;
}

std::vector<Sheet> analyse_flops(const AnalyseOptions& options) {
  return {term_sheet("flops_terms", "FLOPs per head and unit: constant + linear x + quadratic x^2", options,
                     analysis::flop_terms, analysis::printed_flop_terms),
          total_sheet("flops_totals", "FLOPs of the whole call, " + size_text(options), options, analysis::flop_terms,
                      analysis::printed_flops),
          gate_sheet(options), curve_sheet(options)};
}

std::vector<Sheet> analyse_bytes(const AnalyseOptions& options) {
  return {term_sheet("bytes_terms", "Bytes moved per head and unit: constant + linear x", options, analysis::byte_terms,
                     nullptr),
          total_sheet("bytes_totals", "Bytes of the whole call, " + size_text(options), options, analysis::byte_terms,
                      analysis::printed_bytes)};
}

}  // namespace tfla::cli
