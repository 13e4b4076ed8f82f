//! The `bench` program: reads the command line, runs the subcommand, turns the outcome into an exit code.

use std::process::ExitCode;

use bench::args::{Cli, Command};
use clap::Parser;

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Serve(args) => bench::run::serve(&args),
    };
    match outcome {
        Ok(summary) if summary.statistics.completed_requests > 0 => ExitCode::SUCCESS,
        Ok(_) => {
            eprintln!("error: no request succeeded");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
