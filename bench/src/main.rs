//! The `bench` program: reads the command line, runs the subcommand, turns the outcome into an exit code.

use std::process::ExitCode;

use bench::args::{Cli, Command};
use clap::Parser;

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Serve(args) => {
            bench::run::serve(&args).map(|summary| summary.statistics.completed_requests > 0)
        }
        Command::Sweep(args) => bench::sweep::sweep(&args)
            .map(|cells| cells.iter().any(|cell| cell.summary.statistics.completed_requests > 0)),
        Command::Knee(args) => bench::knee::knee(&args)
            .map(|knee| knee.steps.iter().any(|step| step.summary.statistics.completed_requests > 0)),
        Command::Overhead(args) => bench::overhead::overhead(&args).map(|report| report.success_count() > 0),
        Command::Simulate(args) => bench::simulate::simulate(&args).map(|simulations| simulations > 0),
        Command::Size(args) => bench::size::size(&args).map(|found| !found.is_empty()),
        Command::Soak(args) => bench::soak::soak(&args).map(|report| report.answered > 0),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            eprintln!("error: no request succeeded");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
